// SPDX-License-Identifier: Apache-2.0

package quota

import "slices"

// Name is how a container says one of cgpu's own settings. Variable is empty where only an annotation can say it;
// Native is another variable that means the same, where there is one.
type Name struct{ Variable, Annotation, Native string }

// Names are all of cgpu's own settings, for the documentation.
func Names() []Name {
	var all []Name
	for _, n := range names {
		all = append(all, Name{n.variable, n.annotation, n.native})
	}
	return all
}

// Word is a name that counts in a dialect.
type Word struct {
	Dialect    Dialect
	Name       string
	Annotation bool // else it is a variable
	Numbered   bool // NAME_0, NAME_1 and so on count, too
}

// Words are all names that dialects bring, for the documentation. Gpushare brings none of its own: its annotations have
// the names of cgpu's variables.
func Words() []Word {
	var all []Word
	for _, d := range dialects {
		for _, list := range [][]string{d.memory, d.other} {
			for _, name := range list {
				all = append(all, Word{d.name, name, d.annotated, slices.Contains(d.numbered, name)})
			}
		}
	}
	return all
}
