"""What tests of the spool share."""
