"""Which mounts count as network file systems."""

from __future__ import annotations

import pytest

from llmgw.settings.filesystem import is_network, kind_of, network_file_system

MOUNTS = r"""
21 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:40 / /srv rw - nfs4 nas:/export rw,vers=4.2
31 30 0:41 / /srv/local\040disk rw - xfs /dev/vdb rw
32 21 0:42 / /mnt/s3 rw shared:9 master:2 - fuse.s3fs s3fs rw
33 21 0:43 / /over rw - nfs nas:/a rw
34 21 0:44 / /over rw - ext4 /dev/vdc rw
a broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib/llmgw", "ext4"),
        ("/srv", "nfs4"),
        ("/srv/llmgw", "nfs4"),
        ("/srvother", "ext4"),
        ("/srv/local disk/x", "xfs"),
        ("/mnt/s3/deep/er", "fuse.s3fs"),
        ("/over/x", "ext4"),
    ],
)
def test_the_innermost_and_latest_mount_decides(folder, kind):
    assert kind_of(folder, MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse", "fuse.sshfs", "fuse.s3fs", "lustre"])
def test_network_file_systems_are_known(kind):
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", ""])
def test_local_file_systems_are_taken(kind):
    assert not is_network(kind)


def test_the_folder_of_a_test_is_local(tmp_path):
    assert network_file_system(str(tmp_path)) is None
