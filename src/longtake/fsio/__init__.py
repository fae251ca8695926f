"""Files shared by several processes: atomic writes, JSON lines and typed records.

Files are written under a temporary name and renamed, or appended line by line. Readers trust
nothing: only regular files are read, lines and nesting are limited, and pydantic validates every
record.
"""

from longtake.fsio.fields import (
    Count,
    FileName,
    Finite,
    InnerPath,
    NumberOrText,
    Span,
    Time,
    Timestamp,
    by_field,
    file_time,
    format_number,
    is_file_name,
    now,
    with_other_fields,
)
from longtake.fsio.folders import (
    atomic_folder,
    claim_folder,
    is_linked,
    make_writable,
    refuse_links,
    remove_oldest,
    remove_tree,
)
from longtake.fsio.journal import Journal
from longtake.fsio.opening import (
    FileVersion,
    cache_folder,
    file_version,
    is_missing,
    open_below,
    open_folder_below,
    open_regular,
    read_regular,
    reading_below,
    version_of,
)
from longtake.fsio.records import (
    MAX_LINE_BYTES,
    MAX_LINE_DEPTH,
    Kind,
    Tail,
    check_record,
    is_nested_deeper,
    note_skipped_lines,
    parse_record,
    read_json,
    read_json_lines,
    read_last_record,
    read_lines,
    read_new_records,
    read_record,
    read_records,
    require_record,
    skipped_lines,
)
from longtake.fsio.writing import (
    append_json,
    atomic_write,
    check_picture_name,
    flush_to_disk,
    is_there,
    no_follow,
    partial_path,
    write_json,
    write_once,
    write_text,
)
