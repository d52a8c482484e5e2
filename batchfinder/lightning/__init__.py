"""The BatchFinder callback: sizes found, set and accumulated on fit start, leaving no trace. [pytorch_lightning]"""
