"""``treeattn demo``: a real language model decodes with draft trees (:mod:`treeattn.demo.run`)."""
