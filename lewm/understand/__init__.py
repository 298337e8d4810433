"""What a trained model has understood: each verb of `lewm understand` is a function here, and a file.

subject     the model that is looked at, and the episodes that it is shown
findings    what every verb returns: tables, sentences, numbers and a figure, and how they are written
"""
