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
func editEnv(doc *Document, p Plan) error {
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

// editLimiter puts the limiter first into LD_PRELOAD, before what the container preloads itself.
func editLimiter(doc *Document, p Plan) error {
	if p.Limiter == "" {
		return nil
	}
	names, raw, err := readEnv(doc)
	if err != nil {
		return err
	}
	const preload = "LD_PRELOAD"
	value := p.Limiter
	var kept [][]byte
	for i, name := range names {
		if name != preload {
			kept = append(kept, raw[i])
			continue
		}
		entry, err := unquote(raw[i])
		if err != nil {
			return err
		}
		// The last one counts (runc drops earlier ones).
		if _, own, _ := strings.Cut(entry, "="); own != "" {
			value = p.Limiter + ":" + own
		}
	}
	return doc.setList(append(kept, quote(preload+"="+value)), "env", "process")
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
