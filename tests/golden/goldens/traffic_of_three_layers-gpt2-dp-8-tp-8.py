# gpt2, 3 layers, 64 x 1024 tokens, dp=8, tp=8, sequence=True
# backward dp all_reduce             x1        0.656 MiB
# backward dp all_reduce_bucket      x3       50.020 MiB
# backward tp all_gather_replicated  x3       63.000 MiB
# backward tp all_reduce             x1        0.055 MiB
# backward tp all_reduce_bucket      x1        0.072 MiB
# backward tp all_to_all             x3       23.625 MiB
# backward tp reduce_scatter         x11     338.833 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x10     210.000 MiB
# forward  tp all_gather_bucket      x1      128.833 MiB
# forward  tp all_reduce             x3        0.109 MiB
# forward  tp all_to_all             x3       23.625 MiB
# forward  tp reduce_scatter         x3       63.000 MiB
# gpt2, 3 layers, 64 x 1024 tokens, dp=8, tp=8, sequence=False
# backward dp all_reduce             x1        5.250 MiB
# backward dp all_reduce_bucket      x3       50.047 MiB
# backward tp all_reduce             x5      168.055 MiB
# backward tp all_reduce_bucket      x1        0.087 MiB
# backward tp all_to_all             x3       23.625 MiB
# backward tp reduce_scatter         x6      126.000 MiB
# forward  dp all_reduce             x2        0.000 MiB
# forward  tp all_gather             x6      126.000 MiB
# forward  tp all_reduce             x7      168.109 MiB
# forward  tp all_to_all             x3       23.625 MiB
