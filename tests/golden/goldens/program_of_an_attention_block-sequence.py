# level spmd on dp=2, tp=2 at {'dp': 0, 'tp': 0}
def program(
    p_model_qkv_weight: "f32[3*512{tp}, 512]",  # parameter grad qkv.weight · dp=R tp=d0.1.0
    p_model_out_weight: "f32[512, 512{tp}]",  # parameter grad out.weight · dp=R tp=d1.0
    tensors_0: "f32[64{dp}, 1024, 512]",  # input x · dp=d0 tp=R
):
    vary_default: "f32[3*512{tp}, 512] ~dp" = autopar.vary.default(p_model_qkv_weight, 'dp')  # dp=R tp=d0.1.0
    linear_default: "f32[64{dp}, 1024, 3*512{tp}]" = aten.linear.default(tensors_0, vary_default)  # dp=b0 tp=o.1.0 · qkv · test_goldens.py
    reshape_default: "f32[64{dp}, 1024, 3, 512{tp}]" = aten.reshape.default(linear_default, [32, 1024, 3, 256])  # dp=v0_0 tp=v2_1.0 · test_goldens.py
    select_int: "f32[64{dp}, 1024, 512{tp}]" = aten.select.int(reshape_default, 2, 0)  # dp=d0 tp=d3.0 · test_goldens.py
    select_int_1: "f32[64{dp}, 1024, 512{tp}]" = aten.select.int(reshape_default, 2, 1)  # dp=d0 tp=d3.0 · test_goldens.py
    select_int_2: "f32[64{dp}, 1024, 512{tp}]" = aten.select.int(reshape_default, 2, 2)  # dp=d0 tp=d3.0 · test_goldens.py
    reshape_default_1: "f32[64{dp}, 1024, 8{tp}, 64]" = aten.reshape.default(select_int, [32, 1024, 4, 64])  # dp=v0_0 tp=v2_0 · test_goldens.py
    transpose_int: "f32[64{dp}, 8{tp}, 1024, 64]" = aten.transpose.int(reshape_default_1, 1, 2)  # dp=d0 tp=d2 · test_goldens.py
    reshape_default_2: "f32[64{dp}, 1024, 8{tp}, 64]" = aten.reshape.default(select_int_1, [32, 1024, 4, 64])  # dp=v0_0 tp=v2_0 · test_goldens.py
    transpose_int_1: "f32[64{dp}, 8{tp}, 1024, 64]" = aten.transpose.int(reshape_default_2, 1, 2)  # dp=d0 tp=d2 · test_goldens.py
    reshape_default_3: "f32[64{dp}, 1024, 8{tp}, 64]" = aten.reshape.default(select_int_2, [32, 1024, 4, 64])  # dp=v0_0 tp=v2_0 · test_goldens.py
    transpose_int_2: "f32[64{dp}, 8{tp}, 1024, 64]" = aten.transpose.int(reshape_default_3, 1, 2)  # dp=d0 tp=d2 · test_goldens.py
    scaled_dot_product_attention_default: "f32[64{dp}, 8{tp}, 1024, 64]" = aten.scaled_dot_product_attention.default(transpose_int, transpose_int_1, transpose_int_2, None, 0.0, True)  # dp=b0 tp=b1 · test_goldens.py
    transpose_int_3: "f32[64{dp}, 1024, 8{tp}, 64]" = aten.transpose.int(scaled_dot_product_attention_default, 1, 2)  # dp=d0 tp=d1 · test_goldens.py
    reshape_default_4: "f32[64{dp}, 1024, 512{tp}]" = aten.reshape.default(transpose_int_3, [32, 1024, 256])  # dp=v0_0 tp=v2_0 · test_goldens.py
    vary_default_1: "f32[512, 512{tp}] ~dp" = autopar.vary.default(p_model_out_weight, 'dp')  # dp=R tp=d1.0
    linear_default_1: "f32[64{dp}, 1024, 512] +tp" = aten.linear.default(reshape_default_4, vary_default_1)  # dp=b0 tp=b2.0 · out · test_goldens.py
    all_reduce_default: "f32[64{dp}, 1024, 512]" = autopar.all_reduce.default(linear_default_1, 'tp', 'sum')  # dp=b0 tp=b2.0 · out · test_goldens.py
    add_tensor: "f32[64{dp}, 1024, 512]" = aten.add.Tensor(tensors_0, all_reduce_default)  # dp=d0 tp=R · test_goldens.py
    square_default: "f32[64{dp}, 1024, 512]" = aten.square.default(add_tensor)  # dp=d0 tp=R · test_goldens.py
    sum_dim_int_list: "f32[] +dp" = aten.sum.dim_IntList(square_default, [0, 1, 2])  # dp=d0 tp=R · test_goldens.py
    div_tensor: "f32[] +dp" = aten.div.Tensor(sum_dim_int_list, 33554432.0)  # dp=P0 tp=R · test_goldens.py
    all_reduce_default_1: "f32[]" = autopar.all_reduce.default(div_tensor, 'dp', 'sum')  # dp=P0 tp=R · test_goldens.py
    return (all_reduce_default_1,)
# outputs loss 0
