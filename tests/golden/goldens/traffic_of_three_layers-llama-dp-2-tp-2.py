# llama, 3 layers, 64 x 1024 tokens, dp=2, tp=2, sequence=True
# backward dp all_reduce_bucket      x18    1626.027 MiB
# backward tp all_gather_replicated  x10     384.438 MiB
# backward tp all_reduce             x1        0.125 MiB
# backward tp reduce_scatter         x17    1280.438 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x17    1280.438 MiB
# forward  tp all_reduce             x3        0.250 MiB
# forward  tp reduce_scatter         x10     384.438 MiB
# llama, 3 layers, 64 x 1024 tokens, dp=2, tp=2, sequence=False
# backward dp all_reduce_bucket      x18    1626.055 MiB
# backward tp all_reduce             x7     1536.125 MiB
# backward tp all_reduce_bucket      x1        0.055 MiB
# backward tp reduce_scatter         x1      128.000 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x1      128.000 MiB
# forward  tp all_reduce             x9     1536.250 MiB
