"""The layers that hold weights, each naming its logical axes: linear, norms, embeddings, rotary positions, MLP."""
