"""What servers load, by the path of this folder; the learner imports the fast lane from here: both sides have one."""
