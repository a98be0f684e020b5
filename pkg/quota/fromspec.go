// SPDX-License-Identifier: Apache-2.0

package quota

import "slices"

// FromSpec reads a container's request from the variables (process.env) and annotations of its OCI spec.
//
// It returns nil, nil when the container did not ask for a vGPU: ALIYUN_COM_GPU_MEM_CONTAINER is neither a variable nor
// an annotation nor is its like in one of the dialects, or CGPU_DISABLE is true. Nothing else is looked at then, so a
// container that is not ours is never refused. Everything that was asked for must be well-formed; the error is an *Error.
func FromSpec(env []string, annotations map[string]string, dialects ...Dialect) (*Quota, error) {
	s := gather(env, annotations)
	said := s.listen(env, annotations, dialects)
	own := s.annotations[memContainer].set || s.variables[memContainer].set && !s.foreign
	if !own && !slices.ContainsFunc(said, func(sp speech) bool { return sp.asks }) {
		return nil, nil
	}
	if off, err := disabled(s); off || err != nil {
		return nil, err
	}
	q := &Quota{Asked: map[string]string{}, Ignored: s.ignored(env, annotations, dialects)}
	q.Priority = PriorityDefault
	readers := []func(*Quota, *settings) error{readMemory, readPod, readSpill, readGPUs, readCompute, readLimiter, readDomain}
	if !own {
		readers = readers[2:]
	}
	for _, read := range readers {
		if err := read(q, s); err != nil {
			return nil, err
		}
	}
	if len(said) == 0 && !s.gpushare {
		return q, nil
	}
	wish, err := s.understand(said)
	if err == nil {
		err = q.adopt(s, wish)
	}
	if err != nil {
		return nil, err
	}
	return q, nil
}

// disabled reads the off switch. Of a request by annotation only the annotation switches off.
func disabled(s *settings) (bool, error) {
	off, err := s.get(disable)
	if err != nil {
		return false, err
	}
	switch off.value {
	case "true", "1":
		return true, nil
	case "", "false", "0":
		return false, nil
	}
	return false, off.bad("want true or false", "")
}

// used returns a setting, and notes that it was used where it is set.
func (q *Quota) used(s *settings, k key) (setting, error) {
	v, err := s.get(k)
	if err == nil && v.set {
		q.Asked[v.name] = v.value
	}
	return v, err
}

// askedBy is the name under which k was used.
func (q *Quota) askedBy(k key) (string, bool) {
	for _, name := range []string{names[k].annotation, names[k].variable, names[k].native} {
		if _, ok := q.Asked[name]; ok {
			return name, true
		}
	}
	return "", false
}

// source finds the setting that q got from one of keys, the first that was used, for messages after FromSpec.
func (q *Quota) source(keys ...key) (name, value string) {
	for _, k := range keys {
		if word, ok := q.from[k]; ok {
			return word.name, word.value
		}
		if name, ok := q.askedBy(k); ok {
			return name, q.Asked[name]
		}
	}
	return names[keys[0]].variable, ""
}
