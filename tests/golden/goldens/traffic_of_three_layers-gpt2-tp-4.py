# gpt2, 3 layers, 64 x 1024 tokens, tp=4, sequence=True
# backward tp all_gather_replicated  x6      864.000 MiB
# backward tp all_reduce             x1        0.375 MiB
# backward tp all_reduce_bucket      x1        0.088 MiB
# backward tp reduce_scatter         x8      976.678 MiB
# forward  tp all_gather             x7      866.250 MiB
# forward  tp all_gather_bucket      x1      110.428 MiB
# forward  tp all_reduce             x3        0.750 MiB
# forward  tp reduce_scatter         x6      864.000 MiB
# gpt2, 3 layers, 64 x 1024 tokens, tp=4, sequence=False
# backward tp all_reduce             x7     1728.375 MiB
# backward tp all_reduce_bucket      x1        0.062 MiB
# backward tp reduce_scatter         x1      110.428 MiB
# backward tp reduce_scatter_bucket  x1        2.250 MiB
# forward  tp all_gather_bucket      x2      112.678 MiB
# forward  tp all_reduce             x9     1728.750 MiB
