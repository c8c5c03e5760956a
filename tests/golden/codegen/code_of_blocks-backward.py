def backward(comm, device, inputs):
    keep_mask_default_each = inputs[:6]
    relu_each = inputs[6:12]
    t_1_each = inputs[12:18]
    getitem_each = inputs[18:24]
    addmm_each = inputs[24:30]
    getitem_1_each = inputs[30:36]
    getitem_2_each = inputs[36:42]
    p_model_norm_weight = inputs[42:48]
    tensors_0 = inputs[48]
    tangent_0 = inputs[49]
    inputs.clear()
    # 6 (test_codegen.py)
    shard = comm.shard(tangent_0, 'dp', 0, 1, [2, 2], 2); del tangent_0
    view_each, t_10_each, getitem_19_each, getitem_20_each = [], [], [], []
    add_tensor = shard
    del shard
    for i in reversed(range(6)):
        # {i + 1} (test_codegen.py)
        mul_12 = aten.mul.Tensor(add_tensor, 2.0)
        mul_13 = aten.mul.Tensor(mul_12, keep_mask_default_each.pop()); del mul_12
        # {i + 1} (test_codegen.py)
        threshold_backward = aten.threshold_backward.default(mul_13, relu_each.pop(), 0); del mul_13
        # {i + 1}.linear (test_codegen.py)
        t_7 = aten.t.default(t_1_each.pop())
        mm = aten.mm.default(threshold_backward, t_7); del t_7
        t_8 = aten.t.default(threshold_backward)
        mm_1 = aten.mm.default(t_8, getitem_each.pop()); del t_8
        t_9 = aten.t.default(mm_1); del mm_1
        sum_1 = aten.sum.dim_IntList(threshold_backward, [0], True); del threshold_backward
        view_each.append(aten.reshape.default(sum_1, [8])); del sum_1
        t_10_each.append(aten.t.default(t_9)); del t_9
        # {i + 1}.norm (test_codegen.py)
        p_model_1_norm_weight = p_model_norm_weight.pop()
        native_layer_norm_backward = aten.native_layer_norm_backward.default(mm, addmm_each.pop(), [8], getitem_1_each.pop(), getitem_2_each.pop(), p_model_1_norm_weight, p_model_1_norm_weight, [True, True, True]); del mm, p_model_1_norm_weight
        getitem_18 = native_layer_norm_backward[0]
        getitem_19_each.append(native_layer_norm_backward[1])
        getitem_20_each.append(native_layer_norm_backward[2]); del native_layer_norm_backward
        add_tensor = aten.add.Tensor(add_tensor, getitem_18); del getitem_18
    # 0
    t_31 = aten.t.default(add_tensor)
    mm_12 = aten.mm.default(t_31, tensors_0); del t_31, tensors_0
    t_32 = aten.t.default(mm_12); del mm_12
    sum_7 = aten.sum.dim_IntList(add_tensor, [0], True); del add_tensor
    view_6 = aten.reshape.default(sum_7, [8]); del sum_7
    t_33 = aten.t.default(t_32); del t_32
    all_reduce_bucket_default = comm.all_reduce_bucket_start([*(v for row in zip(view_each, t_10_each, getitem_20_each, getitem_19_each) for v in row), view_6, t_33], 'dp'); del view_each, t_10_each, getitem_20_each, getitem_19_each, view_6, t_33
    all_reduce_bucket_default = all_reduce_bucket_default.wait()
    return [
        *all_reduce_bucket_default[::-1],
    ]
