package quorum

import (
	"errors"
	"fmt"
	"time"
)

// Policy has the settings that decide when a quorum forms. Errors name them as the options of the command.
//
// A machine gets a valid policy (Validate), and keeps it, but for MaxReplicas (Limited): a timer that began
// with one timeout must not end with another.
type Policy struct {
	MinReplicas      int           // groups a quorum needs at least
	MaxReplicas      int           // groups that train; further ones are standbys (seats.go). 0: no limit
	JoinTimeout      time.Duration // how long a possible quorum waits for healthy groups that have not asked
	HeartbeatTimeout time.Duration // a group whose last heartbeat is as old as this counts as failed
	SuspectGrace     time.Duration // how long a group whose connection broke may take to come back
	// StalledAfter is how long a group may make no progress while others wait for it before it is reported;
	// 0: ten median steps, at least 5 s, and at least 1 ms for each group.
	StalledAfter time.Duration
	// EjectStalledAfter is how long such a group may make no progress before it is evicted from the quorum;
	// EjectAuto: the limit of its phase, which in a step is ten median steps, three times the longest, and at
	// least 30 s (phases.go); 0: never.
	EjectStalledAfter time.Duration
	// refuse a quorum below the step that the job had reached, instead of logging a warning
	ForbidRegression bool
}

// Validate names every setting that is out of range, its value, and what is allowed.
func (p Policy) Validate() error {
	var errs []error
	if p.MinReplicas < 1 {
		errs = append(errs, fmt.Errorf("min_replicas is %d: it must be at least 1", p.MinReplicas))
	}
	if p.MaxReplicas != 0 && p.MaxReplicas < p.MinReplicas {
		errs = append(errs, fmt.Errorf("max_replicas is %d: it must be at least min_replicas (%d), or 0 (no "+
			"limit)", p.MaxReplicas, p.MinReplicas))
	}
	if p.JoinTimeout <= 0 {
		errs = append(errs, fmt.Errorf("join_timeout_ms is %s: it must be more than 0",
			milliseconds(p.JoinTimeout)))
	}
	if p.HeartbeatTimeout <= 0 {
		errs = append(errs, fmt.Errorf("heartbeat_timeout_ms is %s: it must be more than 0",
			milliseconds(p.HeartbeatTimeout)))
	}
	if p.SuspectGrace < 0 {
		errs = append(errs, fmt.Errorf("suspect_grace_ms is %s: it must be at least 0",
			milliseconds(p.SuspectGrace)))
	}
	if p.StalledAfter < 0 {
		errs = append(errs, fmt.Errorf("stalled_after_ms is %s: it must be at least 0 (0: ten median "+
			"steps, at least 5 s)", milliseconds(p.StalledAfter)))
	}
	if p.EjectStalledAfter < 0 && p.EjectStalledAfter != EjectAuto {
		errs = append(errs, fmt.Errorf("eject_stalled_after_ms is %s: it must be auto, or at least 0 (0: "+
			"never)", milliseconds(p.EjectStalledAfter)))
	}
	return errors.Join(errs...)
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%g", float64(d)/float64(time.Millisecond))
}
