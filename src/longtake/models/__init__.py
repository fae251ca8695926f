"""Model families behind one Protocol, and the codec and text encoder beside them."""
