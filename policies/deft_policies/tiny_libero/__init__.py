"""The small policy that ships with Deft, so that a server does something right after installing.

`checkpoint/` is an OpenVLA in Hugging Face layout, `eagle/` and `medusa/` are its draft heads;
README.md is the model card.
"""
