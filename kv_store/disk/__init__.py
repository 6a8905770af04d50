"""The disk tier: sealed slabs and sessions in files, from which a store that was restarted finds them again."""
