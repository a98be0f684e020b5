package rm

import "fmt"

// NV_STATUS codes, src/common/sdk/nvidia/inc/nvstatuscodes.h. The driver writes them into the outer structure; the
// system call itself still returns 0.
const (
	StatusOK                      = 0x00
	StatusBusyRetry               = 0x03
	StatusGPUIsLost               = 0x0f
	StatusInsertDuplicateName     = 0x19
	StatusInsufficientResources   = 0x1a
	StatusInsufficientPermissions = 0x1b
	StatusInUse                   = 0x17
	StatusInvalidAccessType       = 0x1d
	StatusInvalidAddress          = 0x1e
	StatusInvalidArgument         = 0x1f
	StatusInvalidClass            = 0x22
	StatusInvalidClient           = 0x23
	StatusInvalidCommand          = 0x24
	StatusInvalidDevice           = 0x26
	StatusInvalidFlags            = 0x29
	StatusInvalidLimit            = 0x2e
	StatusInvalidObject           = 0x31
	StatusInvalidObjectHandle     = 0x33
	StatusInvalidObjectNew        = 0x34
	StatusInvalidObjectOld        = 0x35
	StatusInvalidObjectParent     = 0x36
	StatusInvalidParamStruct      = 0x3a
	StatusInvalidParameter        = 0x3b
	StatusInvalidPointer          = 0x3d
	StatusInvalidState            = 0x40
	StatusNoMemory                = 0x51
	StatusNotSupported            = 0x56
	StatusObjectNotFound          = 0x57
	StatusOperatingSystem         = 0x59
	StatusTimeout                 = 0x65
	StatusGeneric                 = 0xffff
)

// StatusName is the code's name as in NVIDIA's header, for logs.
func StatusName(s uint32) string { return fmt.Sprintf("status %#x", s) }
