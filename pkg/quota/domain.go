// SPDX-License-Identifier: Apache-2.0

package quota

import "strings"

// maxDomain bounds the length of a domain's name.
const maxDomain = 63

// readDomain reads which trust domain the container belongs to, and its part there.
func readDomain(q *Quota, s *settings) (err error) {
	if q.Threads, err = readSmall(q, s, threads, MaxPercent); err != nil {
		return err
	}
	v, err := q.used(s, domain)
	if err != nil || v.value == "" { // as somebody says who does not want that of his image
		if err == nil && q.Threads != 0 {
			err = q.refuse("counts in a trust domain only", "set CGPU_DOMAIN too", threads)
		}
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
	const signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
	if name == "" || len(name) > maxDomain || name[0] == '-' || strings.Trim(name, signs) != "" {
		return "want 1 to 63 letters, digits and dashes, the first no dash"
	}
	return ""
}

// RefuseDomain makes the error for a domain that the container cannot be in.
func (q *Quota) RefuseDomain(reason, remedy string) error { return q.refuse(reason, remedy, domain) }
