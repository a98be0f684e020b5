// SPDX-License-Identifier: Apache-2.0

package quota

// maxDomain bounds the length of a domain's name.
const maxDomain = 63

// readDomain reads which trust domain the container belongs to, and its part there.
func readDomain(q *Quota, s *settings) (err error) {
	if q.Threads, err = readSmall(q, s, threads, MaxPercent); err != nil {
		return err
	}
	v, err := q.used(s, domain)
	if err != nil || !v.set {
		return err
	}
	if reason := CheckDomain(v.value); reason != "" {
		return v.bad(reason, "")
	}
	q.Domain = v.value
	return nil
}

// CheckDomain says what is wrong with a domain's name; nothing: it is one.
func CheckDomain(name string) string {
	const want = "want 1 to 63 letters, digits and dashes, with a letter or digit at both ends"
	if name == "" || len(name) > maxDomain || name[0] == '-' || name[len(name)-1] == '-' {
		return want
	}
	for i := range len(name) {
		c := name[i]
		if !isDigit(c) && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' {
			return want
		}
	}
	return ""
}

// RefuseDomain makes the error for a domain that the container cannot be in.
func (q *Quota) RefuseDomain(reason, remedy string) error { return q.refuse(reason, remedy, domain) }

// RefuseThreads makes the error for a part of the multiprocessors that the container cannot have.
func (q *Quota) RefuseThreads(reason, remedy string) error { return q.refuse(reason, remedy, threads) }
