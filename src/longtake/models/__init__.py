"""Model families behind one Protocol, with their codecs and text encoders."""
