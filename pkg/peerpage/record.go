// SPDX-License-Identifier: Apache-2.0

package peerpage

// record is a list of words that one process writes and others read: two copies of it, and a number of which the last bit says which
// copy is good. Who is killed while it writes has changed the other one.
type record struct {
	p     *Page
	at    int // u64: the number, then the copies
	words int
}

func (r record) copy(n uint64) int { return r.at + 8 + int(n&1)*8*r.words }

// write makes words the good copy.
func (r record) write(words []uint64) {
	n := r.p.u64(r.at).Load() + 1
	for i, w := range words {
		r.p.store64(r.copy(n)+8*i, w)
	}
	r.p.store64(r.at, n)
}

// read fills words from the good copy. False: it is written all the time.
func (r record) read(words []uint64) (n uint64, ok bool) {
	for range 16 {
		n = r.p.u64(r.at).Load()
		for i := range words {
			words[i] = r.p.u64(r.copy(n) + 8*i).Load()
		}
		if r.p.u64(r.at).Load() == n {
			return n, true
		}
	}
	return n, false
}
