"""Who may do what, before gradio sees a request."""
