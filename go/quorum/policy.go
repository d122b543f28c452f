package quorum

import (
	"errors"
	"fmt"
	"time"
)

// Policy is when a lighthouse lets a quorum form. The names in errors are those of the command's options.
type Policy struct {
	MinReplicas      int           // groups a quorum needs at least
	JoinTimeout      time.Duration // how long a possible quorum waits for healthy groups that have not asked
	HeartbeatTimeout time.Duration // a group whose last heartbeat is as old as this counts as dead
}

// Validate names every setting that is out of range, its value, and what is allowed.
func (p Policy) Validate() error {
	var errs []error
	if p.MinReplicas < 1 {
		errs = append(errs, fmt.Errorf("min_replicas is %d: it must be at least 1", p.MinReplicas))
	}
	if p.JoinTimeout <= 0 {
		errs = append(errs, fmt.Errorf("join_timeout_ms is %s: it must be more than 0", milliseconds(p.JoinTimeout)))
	}
	if p.HeartbeatTimeout <= 0 {
		errs = append(errs, fmt.Errorf("heartbeat_timeout_ms is %s: it must be more than 0", milliseconds(p.HeartbeatTimeout)))
	}
	return errors.Join(errs...)
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%g", float64(d)/float64(time.Millisecond))
}
