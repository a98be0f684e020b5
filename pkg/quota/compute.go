package quota

import "strconv"

// Bounds of the compute settings.
const (
	MaxWeight  = 64
	MaxPercent = 100
)

// readCompute reads weight, percent and priority.
func readCompute(q *Quota, s *settings) (err error) {
	if q.Weight, err = readSmall(q, s, schdWeight, MaxWeight); err != nil {
		return err
	}
	if q.Percent, err = readSmall(q, s, corePercentage, MaxPercent); err != nil {
		return err
	}
	prio, err := q.take(s, highPrio)
	if err != nil || !prio.set {
		return err
	}
	// The variable is a yes or no; best effort cannot be asked for by it.
	switch prio.value {
	case "1", "true":
		q.Priority = PriorityHigh
	case "0", "false":
		q.Priority = PriorityDefault
	default:
		return prio.bad("want 1 or true for high priority, 0 or false for the default", "")
	}
	return nil
}

// readSmall reads a whole number from 1 to most; 0 when it is not set.
func readSmall(q *Quota, s *settings, k key, most uint64) (int, error) {
	v, err := q.take(s, k)
	if err != nil || !v.set {
		return 0, err
	}
	want := "want a whole number from 1 to " + strconv.FormatUint(most, 10)
	n, reason := parseWhole(v.value, want)
	if reason == "" && n > most {
		reason = want
	}
	if reason != "" {
		return 0, v.bad(reason, "")
	}
	return int(n), nil
}
