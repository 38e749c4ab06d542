"""Published layouts of draft heads: what each file holds, and how it becomes our modules."""
