"""What a trained model has understood: each verb of `lewm understand` is a function here, and a file.

subject     the model that is looked at, and the episodes that it is shown
states      what the dataset recorded of the world, checked
looking     embeddings of frames, and paths of them through episodes
findings    what every verb returns: tables, sentences, numbers and a figure, and how they are written
sheets      which states of a world are mapped
figures     the style of all figures
report      everything that fits a world, on one page
episodes    held-out episodes of the model's own world, of the kind that it was trained on
targets     typed quantities of states, as what probes read; regression, views: how they read it
probe       physical quantities in frozen embeddings, beside the paper's (published)
"""
