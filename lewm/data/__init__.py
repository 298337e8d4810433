"""Episodes on disk and the training windows cut from them: collect -> store -> frames or features -> windows.

Import from the modules: collecting worker processes load ``collect`` and ``store`` without paying for torch.
"""
