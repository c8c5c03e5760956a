def backward(comm, device, inputs):
    (
        addmm_1,
        tensors_1,
        t_4,
        relu,
        tensors_0,
        tangent_0,
    ) = inputs
    inputs.clear()
    # (test_goldens.py)
    div_1 = aten.div.Tensor(tangent_0, 16); del tangent_0
    expand = aten.expand.default(div_1, [2, 4]); del div_1
    mse_loss_backward = aten.mse_loss_backward.default(expand, addmm_1, tensors_1, 0); del expand, addmm_1, tensors_1
    # down (test_goldens.py)
    t_5 = aten.t.default(t_4); del t_4
    mm_1 = aten.mm.default(mse_loss_backward, t_5); del t_5
    t_6 = aten.t.default(mse_loss_backward)
    mm_2 = aten.mm.default(t_6, relu); del t_6
    t_7 = aten.t.default(mm_2); del mm_2
    sum_2 = aten.sum.dim_IntList(mse_loss_backward, [0], True); del mse_loss_backward
    view_1 = aten.reshape.default(sum_2, [4]); del sum_2
    t_8 = aten.t.default(t_7); del t_7
    # (test_goldens.py)
    threshold_backward = aten.threshold_backward.default(mm_1, relu, 0); del mm_1, relu
    # up (test_goldens.py)
    t_1 = aten.t.default(threshold_backward)
    mm = aten.mm.default(t_1, tensors_0); del t_1, tensors_0
    t_2 = aten.t.default(mm); del mm
    sum_1 = aten.sum.dim_IntList(threshold_backward, [0], True); del threshold_backward
    view = aten.reshape.default(sum_1, [16]); del sum_1
    t_3 = aten.t.default(t_2); del t_2
    all_reduce_bucket_default = comm.all_reduce_bucket_start([view_1, t_8, view, t_3], 'dp'); del view_1, t_8, view, t_3
    all_reduce_bucket_default = all_reduce_bucket_default.wait()
    return [
        *all_reduce_bucket_default[::-1],
    ]
