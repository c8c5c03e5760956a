# llama, 3 layers, 64 x 1024 tokens, dp=8, tp=8, sequence=True
# backward dp all_reduce_bucket      x12     711.471 MiB
# backward tp all_gather_replicated  x6      336.000 MiB
# backward tp all_reduce             x1        0.055 MiB
# backward tp all_reduce_bucket      x1        0.096 MiB
# backward tp all_to_all             x1        7.000 MiB
# backward tp reduce_scatter         x7      392.000 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x7      392.000 MiB
# forward  tp all_reduce             x3        0.109 MiB
# forward  tp all_to_all             x1        7.000 MiB
# forward  tp reduce_scatter         x6      336.000 MiB
# llama, 3 layers, 64 x 1024 tokens, dp=8, tp=8, sequence=False
# backward dp all_reduce_bucket      x12     711.471 MiB
# backward tp all_reduce             x7      672.055 MiB
# backward tp all_reduce_bucket      x1        0.096 MiB
# backward tp reduce_scatter         x1       56.000 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x1       56.000 MiB
# forward  tp all_reduce             x9      672.109 MiB
