def backward(comm, device, inputs):
    (
        add,
        tensors_1,
        relu,
        t_1,
        tensors_0,
        tangent_0,
    ) = inputs
    inputs.clear()
    # (test_goldens.py)
    div_1 = aten.div.Tensor(tangent_0, 16); del tangent_0
    expand = aten.expand.default(div_1, [4, 4]); del div_1
    mse_loss_backward = aten.mse_loss_backward.default(expand, add, tensors_1, 0); del expand, add, tensors_1
    # down (test_goldens.py)
    sum_2 = aten.sum.dim_IntList(mse_loss_backward, [0], True)
    view = aten.reshape.default(sum_2, [4]); del sum_2
    t_2 = aten.t.default(mse_loss_backward)
    mm_1 = aten.mm.default(t_2, relu); del t_2
    t_3 = aten.t.default(mm_1); del mm_1
    t_4 = aten.t.default(t_1); del t_1
    mm_2 = aten.mm.default(mse_loss_backward, t_4); del mse_loss_backward, t_4
    t_5 = aten.t.default(t_3); del t_3
    # (test_goldens.py)
    threshold_backward = aten.threshold_backward.default(mm_2, relu, 0); del mm_2, relu
    # up (test_goldens.py)
    t_6 = aten.t.default(threshold_backward)
    mm_3 = aten.mm.default(t_6, tensors_0); del t_6, tensors_0
    t_7 = aten.t.default(mm_3); del mm_3
    sum_3 = aten.sum.dim_IntList(threshold_backward, [0], True); del threshold_backward
    view_1 = aten.reshape.default(sum_3, [8]); del sum_3
    t_8 = aten.t.default(t_7); del t_7
    return [
        t_8,
        view_1,
        t_5,
        view,
    ]
