def backward(comm, device, inputs):
    keep_mask_default_each = inputs[:6]
    relu_each = inputs[6:12]
    t_4_each = inputs[12:18]
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
    view_1_each, t_13_each, getitem_19_each, getitem_20_each = [], [], [], []
    add_tensor = shard
    del shard
    for i in reversed(range(6)):
        # {i + 1} (test_codegen.py)
        mul_13 = aten.mul.Tensor(add_tensor, 2.0)
        mul_1 = aten.mul.Tensor(mul_13, keep_mask_default_each.pop()); del mul_13
        # {i + 1} (test_codegen.py)
        threshold_backward = aten.threshold_backward.default(mul_1, relu_each.pop(), 0); del mul_1
        # {i + 1}.linear (test_codegen.py)
        t_10 = aten.t.default(t_4_each.pop())
        mm_1 = aten.mm.default(threshold_backward, t_10); del t_10
        t_11 = aten.t.default(threshold_backward)
        mm_2 = aten.mm.default(t_11, getitem_each.pop()); del t_11
        t_12 = aten.t.default(mm_2); del mm_2
        sum_2 = aten.sum.dim_IntList(threshold_backward, [0], True); del threshold_backward
        view_1_each.append(aten.reshape.default(sum_2, [8])); del sum_2
        t_13_each.append(aten.t.default(t_12)); del t_12
        # {i + 1}.norm (test_codegen.py)
        p_model_1_norm_weight = p_model_norm_weight.pop()
        native_layer_norm_backward = aten.native_layer_norm_backward.default(mm_1, addmm_each.pop(), [8], getitem_1_each.pop(), getitem_2_each.pop(), p_model_1_norm_weight, p_model_1_norm_weight, [True, True, True]); del mm_1, p_model_1_norm_weight
        getitem_18 = native_layer_norm_backward[0]
        getitem_19_each.append(native_layer_norm_backward[1])
        getitem_20_each.append(native_layer_norm_backward[2]); del native_layer_norm_backward
        add_tensor = aten.add.Tensor(add_tensor, getitem_18); del getitem_18
    # 0
    t_1 = aten.t.default(add_tensor)
    mm = aten.mm.default(t_1, tensors_0); del t_1, tensors_0
    t_2 = aten.t.default(mm); del mm
    sum_1 = aten.sum.dim_IntList(add_tensor, [0], True); del add_tensor
    view = aten.reshape.default(sum_1, [8]); del sum_1
    t_3 = aten.t.default(t_2); del t_2
    all_reduce_bucket_default = comm.all_reduce_bucket_start([*(v for row in zip(view_1_each, t_13_each, getitem_20_each, getitem_19_each) for v in row), view, t_3], 'dp'); del view_1_each, t_13_each, getitem_20_each, getitem_19_each, view, t_3
    all_reduce_bucket_default = all_reduce_bucket_default.wait()
    return [
        *all_reduce_bucket_default[::-1],
    ]
