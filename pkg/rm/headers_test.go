package rm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// testdata/params.csv is what parity/headers measured in NVIDIA's headers, tag by tag: for every control and class that the
// tables name, the size of its structure and where user pointers, client handles and file descriptors sit in it. A pointer
// that a table forgets would be followed in the guard, at an address that a container chose.

// measured is one structure from a tag on; absent: the driver does not have it.
type measured struct {
	absent                 bool
	size                   int
	pointers, clients, fds []int
}

func (m measured) String() string {
	return fmt.Sprintf("%d bytes, pointers %v, clients %v, descriptors %v", m.size, m.pointers, m.clients, m.fds)
}

func readHeaders(t *testing.T) (tags []string, controls, classes map[uint32]map[string]measured) {
	t.Helper()
	controls, classes = map[uint32]map[string]measured{}, map[uint32]map[string]measured{}
	for _, r := range readRecords(t, "testdata/params.csv") {
		id, err := strconv.ParseUint(r[1], 0, 32)
		if err != nil {
			t.Fatal(err)
		}
		m := measured{absent: r[3] == "-", pointers: numbers(t, r[4]), clients: numbers(t, r[5]), fds: numbers(t, r[6])}
		m.size, _ = strconv.Atoi(r[3])
		byID := controls
		if r[0] == "class" {
			byID = classes
		}
		if byID[uint32(id)] == nil {
			byID[uint32(id)] = map[string]measured{}
		}
		byID[uint32(id)][r[2]] = m
		if !slices.Contains(tags, r[2]) {
			tags = append(tags, r[2])
		}
	}
	slices.SortFunc(tags, compareTags)
	return tags, controls, classes
}

func compareTags(a, b string) int {
	v, _ := ParseVersion(a)
	w, _ := ParseVersion(b)
	return v.Compare(w)
}

func numbers(t *testing.T, s string) []int {
	t.Helper()
	var out []int
	for _, f := range strings.Fields(s) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	return sorted(out)
}

func sorted(s []int) []int {
	s = slices.Clone(s)
	slices.Sort(s)
	return slices.Compact(s)
}

// inForce is the structure in force at a tag.
func inForce(rows map[string]measured, tag string) measured {
	best, m := "", measured{absent: true}
	for since, row := range rows {
		if compareTags(since, tag) <= 0 && (best == "" || compareTags(since, best) > 0) {
			best, m = since, row
		}
	}
	return m
}

func TestHeadersControls(t *testing.T) {
	tags, rows, _ := readHeaders(t)
	if len(tags) < 15 || len(rows) < 200 {
		t.Fatalf("%d tags, %d controls", len(tags), len(rows))
	}
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range controls {
			id := controls[i].id
			c, ok := a.Control(id)
			if !ok || c.Kind == ControlDeny {
				continue
			}
			m := inForce(rows[id], tag)
			if m.absent {
				if !unmeasured(a, c) {
					t.Errorf("%s: %s is allowed, but the headers have no structure for it", tag, c.Name)
				}
				continue
			}
			var pointers []int
			for _, p := range c.Pointers {
				pointers = append(pointers, p.Off)
			}
			pointers = append(pointers, c.Clear...)
			var fds []int
			if c.FDOff >= 0 {
				fds = append(fds, c.FDOff)
			}
			if !slices.Equal(sorted(pointers), m.pointers) || !slices.Equal(sorted(c.ClientHandles), m.clients) || !slices.Equal(fds, m.fds) {
				t.Errorf("%s: %s: table has pointers %v, clients %v, descriptors %v; headers: %v", tag, c.Name, pointers, c.ClientHandles, fds, m)
			}
			if c.Size != 0 && c.Size != m.size {
				t.Errorf("%s: %s: %d bytes, headers: %v", tag, c.Name, c.Size, m)
			}
		}
	}
}

// unmeasured: controls that have no structure in any header, or first got one inside a branch.
func unmeasured(a *ABI, c Control) bool {
	switch c.ID {
	case 0x20800145, 0x20800146, 0x20800157, 0x2080220c, 0x20802210, 0x83de0318:
		return true // no parameters: RM refuses any other size than 0
	case 0xb0cc0102, 0xb0cc0104, 0xb0cc0107, 0xb0cc0108, 0xb0cc010b, 0xb0cc010c:
		return true // same
	case 0x80028b:
		return c.Size == 1
	case 0x20800802:
		return len(c.Pointers) == 1 // the structure has a name that the tool does not find
	case 0x20810108, 0x20810110, 0x20810111:
		return true // opaque to the kernel driver
	case 0x90e70113:
		return a.branch == 535 // added inside the branch
	case 0xcb33010c:
		return a.branch == 550 // same
	}
	return false
}

func TestHeadersClasses(t *testing.T) {
	tags, _, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range classes {
			c, _ := a.Class(classes[i].id)
			m := inForce(rows[c.ID], tag)
			if c.Kind == ClassDeny || m.absent {
				continue // the driver does not know the class, or gives it no parameters
			}
			pointers := slices.Clone(c.Clear)
			var fds []int
			switch c.Kind {
			case ClassEvent:
				pointers = append(pointers, EventData) // a number that the driver compares
			case ClassInTask:
				pointers = append(pointers, OSDescDescriptor)
			case ClassMulticast:
				pointers = append(pointers, c.FDOff)
			default:
				if c.FDOff >= 0 {
					fds = append(fds, c.FDOff)
				}
			}
			if !slices.Equal(sorted(pointers), m.pointers) || !slices.Equal(sorted(c.ClientHandles), m.clients) || !slices.Equal(fds, m.fds) {
				t.Errorf("%s: %s: table has pointers %v, clients %v, descriptors %v; headers: %v", tag, c.Name, pointers, c.ClientHandles, fds, m)
			}
			if c.ParamsSize != m.size {
				t.Errorf("%s: %s: %d bytes, headers: %v", tag, c.Name, c.ParamsSize, m)
			}
		}
	}
}
