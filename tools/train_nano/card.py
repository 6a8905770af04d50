"""Writes the model card."""
from tools.train_nano import evaluate
def render(recipe, scores, machine): return "# carrel-nano\n\n" + evaluate.table(scores) + "\n"
