"""torchtune's table of what each lever saves."""
