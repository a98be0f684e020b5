// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"slices"
	"strconv"
	"strings"
)

// Dialect is another system's way of asking for a slice of a GPU. docs/dialects.md says what each of its words means here.
type Dialect string

// The dialects that cgpu.toml can enable.
const (
	DialectHAMi     Dialect = "hami"
	DialectNVIDIA   Dialect = "nvidia"
	DialectMPS      Dialect = "mps"
	DialectPAI      Dialect = "pai"
	DialectTKEStack Dialect = "tkestack"
	DialectGPUShare Dialect = "gpushare"
)

// dialects is all that is known of each: how to tell a container that may use it, and how to read one that does.
var dialects = [...]struct {
	name Dialect
	// marks are texts of which one is in the config.json of every container that asks for something in this dialect. Of a word
	// with a slash they have what is behind it, because JSON may escape the slash.
	marks []string
	// annotated: its words are annotations. The others' are variables.
	annotated bool
	// memory and other are its words: those that ask for a vGPU, and those that say more of it. Each counts alone; those in
	// numbered also with _N behind them, for GPU N of the container.
	memory, other, numbered []string
	read                    func(words) (wish, error)
}{
	{
		name:     DialectHAMi,
		marks:    []string{hamiMemory, hamiSM, hamiPriority},
		memory:   []string{hamiMemory},
		other:    []string{hamiSM, hamiPriority, hamiPolicy, hamiOversubscribe, hamiDisable},
		numbered: []string{hamiMemory, hamiSM},
		read:     readHAMi,
	},
	{
		name:   DialectNVIDIA,
		marks:  []string{"NVIDIA_GPU_MEMORY_"},
		memory: []string{nvidiaLimit, nvidiaLimits, nvidiaRequest, nvidiaRequests},
		read:   readDriverLimit,
	},
	{
		name:   DialectMPS,
		marks:  []string{mpsMemory, mpsPercent},
		memory: []string{mpsMemory},
		other:  []string{mpsPercent, mpsPriority},
		read:   readMPS,
	},
	{
		name:   DialectPAI,
		marks:  []string{paiMemory, paiUtil},
		memory: []string{paiMemory},
		other:  []string{paiEnable, paiUtil, paiReserved},
		read:   readPAI,
	},
	{
		name:      DialectTKEStack,
		marks:     []string{"vcuda-"},
		annotated: true,
		memory:    []string{tkeMemory},
		other:     []string{tkeCore, tkeCoreLimit},
		read:      readTKEStack,
	},
	{
		// gpushare's variables are cgpu's own. What this adds is the annotations that its scheduler writes on the pod, under
		// the same names: a name that a quotation mark follows at once is an annotation's, a variable has its value there.
		name:  DialectGPUShare,
		marks: []string{`ALIYUN_COM_GPU_MEM_IDX"`, `ALIYUN_COM_GPU_MEM_POD"`, `ALIYUN_COM_GPU_MEM_DEV"`},
	},
}

// Dialects are the names of all dialects.
func Dialects() []Dialect {
	var all []Dialect
	for _, d := range dialects {
		all = append(all, d.name)
	}
	return all
}

// ParseDialect reads the name of a dialect.
func ParseDialect(s string) (Dialect, error) {
	all := Dialects()
	if d := Dialect(s); slices.Contains(all, d) {
		return d, nil
	}
	var names []string
	for _, d := range all {
		names = append(names, strconv.Quote(string(d)))
	}
	return "", errors.New("want " + strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1])
}

// Marks are texts of which one is in the config.json of every container that asks for something in d.
func (d Dialect) Marks() []string {
	for _, known := range dialects {
		if known.name == d {
			return known.marks
		}
	}
	return nil
}

// words are a container's settings in one dialect, by name.
type words map[string]setting

// get returns the word of a name. A variable set twice with different values is refused, as cgpu's own are.
func (w words) get(name string) (setting, error) {
	s := w[name]
	if s.conflict {
		return s, s.twice()
	}
	return s, nil
}

// used is get for a word that is to be noted as used, where it is set.
func (w words) used(to *wish, name string) (setting, error) {
	s, err := w.get(name)
	if err == nil && s.set {
		to.used = append(to.used, s)
	}
	return s, err
}

// at returns the word of a name for GPU n of the container.
func at(name string, n int) string { return name + "_" + strconv.Itoa(n) }

// isWord reports that name is word, or with numbered also word_N for a GPU that can exist.
func isWord(name, word string, numbered bool) bool {
	rest, ok := strings.CutPrefix(name, word)
	if !ok || rest == "" {
		return ok
	}
	n, ok := strings.CutPrefix(rest, "_")
	if !numbered || !ok || len(n) > 2 || !isDigits(n) {
		return false
	}
	i, err := strconv.Atoi(n)
	// HAMi looks for the numbers as it writes them: _01 is nothing to it.
	return err == nil && i < maxIDs && strconv.Itoa(i) == n
}

// gatherWords sorts what the container says in one dialect. asks reports that a word of memory is among it, and is not
// one that says there is no limit.
func gatherWords(env []string, annotations map[string]string, memory, other, numbered []string, annotated bool) (w words, asks bool) {
	w = words{}
	add := func(name, value string) {
		is := func(word string) bool { return isWord(name, word, slices.Contains(numbered, word)) }
		ofMemory := slices.ContainsFunc(memory, is)
		if !ofMemory && !slices.ContainsFunc(other, is) {
			return
		}
		s := w[name]
		switch {
		case !s.set:
			s = setting{name: name, value: value, set: true}
		case value != s.value && !s.conflict:
			s.other, s.conflict = value, true
		}
		w[name] = s
		asks = asks || ofMemory && !saysNothing(value)
	}
	if annotated {
		for name, value := range annotations {
			add(name, value)
		}
		return w, asks
	}
	for _, entry := range env {
		name, value, _ := strings.Cut(entry, "=")
		add(name, value)
	}
	return w, asks
}

// saysNothing reports an empty value or a zero of any unit: all these systems take it for no limit.
func saysNothing(value string) bool {
	number := strings.TrimRight(value, "kKmMgGiB")
	return value == "" || number != "" && strings.Trim(number, "0") == ""
}
