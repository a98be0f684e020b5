package rm

import (
	"fmt"
	"strconv"
	"strings"
)

// branches are the driver branches whose headers the tables of this package were compiled against, ascending. Layouts
// were compared at the first and the last public tag of each; they do not change inside a branch.
// 580 is also tested on hardware (580.159.04).
var branches = [...]int{515, 520, 525, 530, 535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595}

// ABI is the interface of one driver branch.
type ABI struct {
	version Version
	branch  int  // one of branches
	guessed bool // the driver's own branch is unknown, branch is the nearest lower one
}

// ForDriver picks the tables for a driver. A branch that this package does not know is an error, because a structure
// that moved would let a container past the guard; allowUnknown takes the nearest lower branch instead.
func ForDriver(version string, allowUnknown bool) (*ABI, error) {
	v, err := ParseVersion(version)
	if err != nil {
		return nil, err
	}
	for i := len(branches) - 1; i >= 0; i-- {
		if branches[i] == v.Major {
			return &ABI{version: v, branch: v.Major}, nil
		}
		if branches[i] < v.Major && allowUnknown {
			return &ABI{version: v, branch: branches[i], guessed: true}, nil
		}
	}
	if allowUnknown {
		return nil, fmt.Errorf("rm: driver %s: older than the oldest known branch %d; update the driver", version, branches[0])
	}
	return nil, fmt.Errorf("rm: driver %s: branch %d is not known (known: %s); use one of these, update cgpu, or set allow_unknown_driver = true at your own risk",
		version, v.Major, strings.Join(KnownBranches(), " "))
}

// KnownBranches lists the known driver branches, ascending.
func KnownBranches() []string {
	s := make([]string, len(branches))
	for i, b := range branches {
		s[i] = strconv.Itoa(b)
	}
	return s
}

// Version is the driver's own version.
func (a *ABI) Version() Version { return a.version }

// Guessed reports that the driver's branch is unknown and that an older branch's tables stand in for it.
func (a *ABI) Guessed() bool { return a.guessed }

// since is a size that holds from a branch on. Lists of them ascend; the first entry starts at 0.
type since struct{ branch, size int }

// sizeAt picks the size for a branch; 0 if the list is empty.
func sizeAt(list []since, branch int) int {
	size := 0
	for _, s := range list {
		if s.branch <= branch {
			size = s.size
		}
	}
	return size
}
