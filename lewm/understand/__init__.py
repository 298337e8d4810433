"""What a trained model has understood: each verb of `lewm understand` is a function here, and a file.

subject     the model that is looked at, and the episodes that it is shown
episodes    episodes to look at, which no training has seen
looking     embeddings of frames, and paths of them through episodes
findings    what every verb returns: tables, sentences, numbers and a figure, and how they are written
sheets      which states of a world are mapped
figures     the style of all figures
report      everything that fits a world, on one page
"""
