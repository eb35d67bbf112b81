"""Integer work, once per batch: which slots are read, in which ranges, by which program. No attention here."""
