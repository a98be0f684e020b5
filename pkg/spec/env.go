// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// visible switches NVIDIA's injectors. "void" is the value that stops both the hook and the runtime; "none" fails the
// container in the runtime's cdi mode.
const visible = "NVIDIA_VISIBLE_DEVICES"

// editEnv writes exactly one NVIDIA_VISIBLE_DEVICES=void, so that no second injector adds devices, and adds the
// driver's variables where the container does not set them.
func editEnv(doc *Document, p *Plan) error {
	names, raw, err := readEnv(doc)
	if err != nil {
		return err
	}
	var kept [][]byte
	set := map[string]bool{visible: true}
	for i, name := range names {
		if name != visible {
			kept = append(kept, raw[i])
			set[name] = true
		}
	}
	for _, entry := range p.Env {
		if name, _, _ := strings.Cut(entry, "="); !set[name] {
			set[name] = true
			kept = append(kept, quote(entry))
		}
	}
	return doc.setList(append(kept, quote(visible+"=void")), "env", "process")
}

// editLimiter puts the limiter first into LD_PRELOAD.
func editLimiter(doc *Document, p *Plan) error {
	if p.Limiter == "" {
		return nil
	}
	_, raw, err := readEnv(doc)
	if err != nil {
		return err
	}
	raw, err = preloaded(raw)
	if err != nil {
		return err
	}
	return doc.setList(raw, "env", "process")
}

// PreloadProcess puts the limiter into the environment of a process that joins a container: raw is the process object that
// a runtime's exec reads from the file of --process. What the create put into config.json is not in it, since engines write
// it from what they know themselves.
func PreloadProcess(raw []byte) ([]byte, error) {
	doc, err := Decode(raw)
	if err != nil {
		return nil, err
	}
	env, err := doc.list("env")
	if err != nil {
		return nil, fmt.Errorf("spec: process: %w", err)
	}
	if env, err = preloaded(env); err != nil {
		return nil, fmt.Errorf("spec: process: %w", err)
	}
	if err := doc.setList(env, "env"); err != nil {
		return nil, err
	}
	return doc.Encode(), nil
}

// preloaded puts the limiter into LD_PRELOAD of an environment, before what is preloaded already, and leaves the variable
// where it is. Of several the last one counts (runc drops earlier ones).
func preloaded(env [][]byte) ([][]byte, error) {
	const name = "LD_PRELOAD"
	kept := make([][]byte, 0, len(env)+1)
	value, place := LimiterPath, -1
	for i, raw := range env {
		entry, err := unquote(raw)
		if err != nil {
			return nil, fmt.Errorf("env[%d]: %w", i, err)
		}
		variable, own, _ := strings.Cut(entry, "=")
		if variable != name {
			kept = append(kept, raw)
			continue
		}
		value, place = LimiterPath, len(kept)
		// The loader takes colons and spaces between the names.
		for _, library := range strings.FieldsFunc(own, func(r rune) bool { return r == ':' || r == ' ' }) {
			if library != LimiterPath {
				value += ":" + library
			}
		}
	}
	if place < 0 {
		place = len(kept)
	}
	return append(kept[:place:place], append([][]byte{quote(name + "=" + value)}, kept[place:]...)...), nil // slices.Insert is a kilobyte
}

// readEnv gives the names of the variables in process.env and the entries as written.
func readEnv(doc *Document) (names []string, raw [][]byte, err error) {
	process, err := doc.within("process")
	if err != nil {
		return nil, nil, err
	}
	if process == nil {
		return nil, nil, errors.New("config.json has no process")
	}
	if raw, err = elements(process.get("env")); err != nil {
		return nil, nil, fmt.Errorf("process.env: %w", err)
	}
	names = make([]string, len(raw))
	for i := range raw {
		var entry string
		if err := json.Unmarshal(raw[i], &entry); err != nil {
			return nil, nil, fmt.Errorf("process.env[%d]: %w", i, err)
		}
		names[i], _, _ = strings.Cut(entry, "=")
	}
	return names, raw, nil
}
