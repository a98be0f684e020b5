// SPDX-License-Identifier: Apache-2.0

package rm

import "bytes"

// CheckVersion answers nv_ioctl_rm_api_version_t as a driver of a version does, by which NVIDIA's libraries find out whether they fit it.
// False: they do not, and the call fails with EINVAL, with the version in the answer all the same. Upstream is RmPerformVersionCheck
// (src/nvidia/arch/nvalloc/unix/src/osapi.c), which then writes five lines to the kernel log, as often as it is asked.
func (a *ABI) CheckVersion(p []byte, version string) bool {
	PutU32(p, CheckVersionReply, 1) // NV_RM_API_VERSION_REPLY_RECOGNIZED
	own := append([]byte(version), 0)
	said := p[CheckVersionString:CheckVersionSize]
	switch U32(p, CheckVersionCmd) {
	case CheckVersionQuery:
		if a.branch >= 530 {
			copy(said, own)
		}
		return true
	case CheckVersionRelaxed:
		if dot := bytes.IndexByte(own, '.'); dot >= 0 && bytes.HasPrefix(said, own[:dot+1]) {
			return true
		}
	}
	if bytes.HasPrefix(said, own) {
		return true
	}
	copy(said, own)
	return false
}
