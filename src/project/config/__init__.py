"""From what was typed to a whole config: composed, with every fault told in a sentence, and objects built from it."""
