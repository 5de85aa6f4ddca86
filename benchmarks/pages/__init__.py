"""Tables and pictures of the documents, made from the results files."""
