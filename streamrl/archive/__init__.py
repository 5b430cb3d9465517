"""Files of closed groups with their scores: the archive of a run, recordings, and scores that were made again."""

from streamrl.archive.reader import ArchivedGroup as ArchivedGroup
from streamrl.archive.reader import ArchivedSample as ArchivedSample
from streamrl.archive.reader import ArchiveReading as ArchiveReading
from streamrl.archive.reader import read_archive as read_archive
