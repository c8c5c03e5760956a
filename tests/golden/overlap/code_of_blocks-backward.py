    for i in reversed(range(5)):
        # {i + 2} (test_codegen.py)
        mul_12 = aten.mul.Tensor(add_tensor, 2.0)
        mul_13 = aten.mul.Tensor(mul_12, keep_mask_default_1_each.pop()); del mul_12
        # {i + 2} (test_codegen.py)
        threshold_backward = aten.threshold_backward.default(mul_13, relu_1_each.pop(), 0); del mul_13
        all_gather_bucket_default = ahead.wait()
        if i > 0:
            ahead = comm.all_gather_bucket_start([p_model_linear_weight.pop(), p_model_norm_weight.pop()], 'fsdp', [0, 0], [1, 1], [4, 4, 4, 4])
        else:
            ahead = comm.all_gather_bucket_start([p_model_1_linear_weight, p_model_1_norm_weight], 'fsdp', [0, 0], [1, 1], [4, 4, 4, 4])
        getitem_36 = all_gather_bucket_default[0]
        getitem_37 = all_gather_bucket_default[1]; del all_gather_bucket_default
        # {i + 2}.linear (test_codegen.py)
        t_6 = aten.t.default(getitem_36); del getitem_36
        t_7 = aten.t.default(t_6); del t_6
        mm = aten.mm.default(threshold_backward, t_7); del t_7
        t_8 = aten.t.default(threshold_backward)
        mm_1 = aten.mm.default(t_8, getitem_3_each.pop()); del t_8
        t_9 = aten.t.default(mm_1); del mm_1
        sum_1 = aten.sum.dim_IntList(threshold_backward, [0], True); del threshold_backward
        view = aten.reshape.default(sum_1, [8]); del sum_1
        t_10 = aten.t.default(t_9); del t_9
        # {i + 2}.norm (test_codegen.py)
        native_layer_norm_backward = aten.native_layer_norm_backward.default(mm, add_each.pop(), [8], getitem_4_each.pop(), getitem_5_each.pop(), getitem_37, getitem_37, [True, True, True]); del mm, getitem_37
        getitem_18 = native_layer_norm_backward[0]
        getitem_19 = native_layer_norm_backward[1]
        getitem_20 = native_layer_norm_backward[2]; del native_layer_norm_backward
        reduce_scatter_bucket_default_each.append(comm.reduce_scatter_bucket_start([view, t_10, getitem_20, getitem_19], 'fsdp', [0, 0, 0, 0], [1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4, 4])); del view, t_10, getitem_20, getitem_19
        add_tensor = aten.add.Tensor(add_tensor, getitem_18); del getitem_18
