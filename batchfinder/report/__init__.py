"""What people see: tables, progress and files."""
