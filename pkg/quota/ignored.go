package quota

import (
	"slices"
	"strconv"
	"strings"
)

// mostIgnored bounds what is told of words that do nothing: a tenant chooses them.
const mostIgnored = 8

// ignored tells what of the container's words does nothing though it looks as if it were for cgpu: a name that is misspelled, or of
// something that cgpu has not.
func (s *settings) ignored(env []string, annotations map[string]string, dialects []Dialect) []string {
	var unknown []string
	add := func(name string) {
		if !slices.Contains(unknown, name) {
			unknown = append(unknown, name)
		}
	}
	for _, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		isName := func(n struct{ variable, annotation string }) bool { return n.variable == name }
		if strings.HasPrefix(name, "ALIYUN_COM_GPU_") && !slices.ContainsFunc(names[:], isName) && !isWordOf(name, dialects) {
			add(name)
		}
	}
	for name := range annotations {
		isName := func(n struct{ variable, annotation string }) bool { return n.annotation == name }
		if strings.HasPrefix(name, "cgpu.io/") && !strings.HasPrefix(name, "cgpu.io/applied.") && !slices.ContainsFunc(names[:], isName) {
			add(name)
		}
	}
	slices.Sort(unknown)
	var list []string
	for _, name := range unknown[:min(len(unknown), mostIgnored)] {
		list = append(list, shorten(name)+", a name that cgpu does not know")
	}
	if more := len(unknown) - mostIgnored; more > 0 {
		list = append(list, strconv.Itoa(more)+" more names that cgpu does not know")
	}
	idx, err1 := s.get(memIdx)
	visible, err2 := s.get(visibleDevices)
	if err1 == nil && err2 == nil && idx.set && visible.set {
		list = append(list, idx.name+", because "+visible.name+" names the GPUs")
	}
	return list
}

// isWordOf says whether a variable is one of the dialects'.
func isWordOf(name string, enabled []Dialect) bool {
	for _, d := range dialects {
		if slices.Contains(enabled, d.name) && !d.annotated && (slices.Contains(d.memory, name) || slices.Contains(d.other, name)) {
			return true
		}
	}
	return false
}

// shorten is show for a name, which needs no quotation marks as it is.
func shorten(name string) string {
	if len(name) > maxShown || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return show(name)
	}
	return name
}
