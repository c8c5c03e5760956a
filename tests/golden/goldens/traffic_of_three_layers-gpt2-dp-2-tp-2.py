# gpt2, 3 layers, 64 x 1024 tokens, dp=2, tp=2, sequence=True
# backward dp all_reduce             x1        1.500 MiB
# backward dp all_reduce_bucket      x5      114.209 MiB
# backward tp all_gather_replicated  x6      288.000 MiB
# backward tp all_reduce             x1        0.125 MiB
# backward tp all_reduce_bucket      x1        0.059 MiB
# backward tp reduce_scatter         x8      363.119 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x7      289.500 MiB
# forward  tp all_gather_bucket      x1       73.619 MiB
# forward  tp all_reduce             x3        0.250 MiB
# forward  tp reduce_scatter         x6      288.000 MiB
# gpt2, 3 layers, 64 x 1024 tokens, dp=2, tp=2, sequence=False
# backward dp all_reduce             x1        3.000 MiB
# backward dp all_reduce_bucket      x5      114.209 MiB
# backward tp all_reduce             x7      576.125 MiB
# backward tp all_reduce_bucket      x1        0.041 MiB
# backward tp reduce_scatter         x1       73.619 MiB
# backward tp reduce_scatter_bucket  x1        1.500 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather_bucket      x2       75.119 MiB
# forward  tp all_reduce             x9      576.250 MiB
