# llama, 3 layers, 64 x 1024 tokens, tp=4, sequence=True
# backward tp all_gather_replicated  x10    1153.312 MiB
# backward tp all_reduce             x1        0.375 MiB
# backward tp reduce_scatter         x17    3841.312 MiB
# forward  tp all_gather             x17    3841.312 MiB
# forward  tp all_reduce             x3        0.750 MiB
# forward  tp reduce_scatter         x10    1153.312 MiB
# llama, 3 layers, 64 x 1024 tokens, tp=4, sequence=False
# backward tp all_reduce             x7     4608.375 MiB
# backward tp all_reduce_bucket      x1        0.082 MiB
# backward tp reduce_scatter         x1      384.000 MiB
# forward  tp all_gather             x1      384.000 MiB
# forward  tp all_reduce             x9     4608.750 MiB
