def forward(comm, device, inputs):
    p_model_0_weight = inputs[0]  # 0.weight [8{fsdp}, 8]
    p_model_0_bias = inputs[1]  # 0.bias [8{fsdp}]
    p_model_norm_weight = inputs[2:23:4]  # {1..6}.norm.weight [8{fsdp}]
    p_model_norm_bias = inputs[3:24:4]  # {1..6}.norm.bias [8{fsdp}]
    p_model_linear_weight = inputs[4:25:4]  # {1..6}.linear.weight [8{fsdp}, 8]
    p_model_linear_bias = inputs[5:26:4]  # {1..6}.linear.bias [8{fsdp}]
    tensors_0 = inputs[26]  # input [4{fsdp}, 8]
    inputs.clear()
    ahead = comm.all_gather_bucket_start([p_model_0_weight, p_model_0_bias], 'fsdp', [0, 0], [1, 1], [4, 4, 4, 4])
    all_gather_bucket_default = ahead.wait(); del p_model_0_weight, p_model_0_bias
    ahead = comm.all_gather_bucket_start([p_model_norm_weight[0], p_model_norm_bias[0], p_model_linear_weight[0], p_model_linear_bias[0]], 'fsdp', [0, 0, 0, 0], [1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4])
    getitem_18 = all_gather_bucket_default[0]  # [8, 8] ~fsdp
    getitem_19 = all_gather_bucket_default[1]; del all_gather_bucket_default  # [8] ~fsdp
    # 0
    t = aten.t.default(getitem_18); del getitem_18
    addmm = aten.addmm.default(getitem_19, tensors_0, t); del getitem_19, t  # [4{fsdp}, 8]
    getitem_each, getitem_1_each, getitem_2_each, relu_each = [], [], [], []
    keep_mask_default_each, add_each = [], []
    add = addmm
    for i in range(6):
        all_gather_bucket_default_1 = ahead.wait()
        if i < 5:
            ahead = comm.all_gather_bucket_start([p_model_norm_weight[i + 1], p_model_norm_bias[i + 1], p_model_linear_weight[i + 1], p_model_linear_bias[i + 1]], 'fsdp', [0, 0, 0, 0], [1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4])
        getitem_20 = all_gather_bucket_default_1[0]  # [8] ~fsdp
        getitem_21 = all_gather_bucket_default_1[1]  # [8] ~fsdp
        getitem_22 = all_gather_bucket_default_1[2]  # [8, 8] ~fsdp
        getitem_23 = all_gather_bucket_default_1[3]; del all_gather_bucket_default_1  # [8] ~fsdp
        # {i + 1}.norm (test_codegen.py)
        native_layer_norm = aten.native_layer_norm.default(add, [8], getitem_20, getitem_21, 1e-05); del getitem_20, getitem_21
        getitem = native_layer_norm[0]  # [4{fsdp}, 8]
        getitem_each.append(getitem)
        getitem_1_each.append(native_layer_norm[1])
        getitem_2_each.append(native_layer_norm[2]); del native_layer_norm
        # {i + 1}.linear (test_codegen.py)
        t_1 = aten.t.default(getitem_22); del getitem_22
        addmm_1 = aten.addmm.default(getitem_23, getitem, t_1); del getitem_23, getitem, t_1  # [4{fsdp}, 8]
        # {i + 1} (test_codegen.py)
        relu = aten.relu.default(addmm_1); del addmm_1  # [4{fsdp}, 8]
        relu_each.append(relu)
        # {i + 1} (test_codegen.py)
        keep_mask_default = comm.keep_mask([2, 8], '[4{fsdp}, 8]', i, 0.5, device=device)  # [4{fsdp}, 8]
        keep_mask_default_each.append(keep_mask_default)
        mul = aten.mul.Tensor(relu, keep_mask_default); del relu, keep_mask_default  # [4{fsdp}, 8]
        mul_1 = aten.mul.Tensor(mul, 2.0); del mul  # [4{fsdp}, 8]
        add = aten.add.Tensor(add, mul_1); del mul_1  # [4{fsdp}, 8]
        add_each.append(add)
    del add_each[-1]
    # 6 (test_codegen.py)
    all_gather_replicated = comm.all_gather_replicated(add, 'fsdp', 0, 1, [2, 2]); del add  # [4, 8]
    return [all_gather_replicated], [
        *keep_mask_default_each,
        *relu_each,
        *p_model_linear_weight,
        *p_model_norm_weight,
        *getitem_each,
        *add_each,
        *getitem_1_each,
        *getitem_2_each,
        addmm,
        tensors_0,
    ]
