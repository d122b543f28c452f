package lighthouse

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/rendezvous"
)

// A restarted lighthouse learns the latest quorum of a job from the job's members, and from a file on disk.
// The file is needed if all members ended while the lighthouse was down: new members do not know the quorum.

const (
	// stateMagic begins each file, with the version of its format.
	stateMagic = "torchft-lighthouse-state 1 "
	// stateAhead is how many quorum ids a file reserves. A file may be written after its quorum was
	// delivered, and writes may fail for a while. So ids above the id of the latest quorum on disk may be in
	// use.
	stateAhead = 1024
)

// state is the content of a file.
type state struct {
	Job string `json:"job"`
	quorum.Kept
	Rendezvous rendezvous.State `json:"rendezvous,omitzero"`
	Used       time.Time        `json:"used,omitzero"` // when the job was last known to be in use
}

func (s state) encode() ([]byte, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%s%x\n%s\n", stateMagic, sha256.Sum256(text), text), nil
}

// decodeState decodes a file's content. It returns an error if the file was truncated or changed.
func decodeState(file []byte, job string) (s state, err error) {
	head, text, found := bytes.Cut(file, []byte("\n"))
	sum, magic := bytes.CutPrefix(head, []byte(stateMagic))
	if !found || !magic {
		return s, errors.New("it does not begin as the state of a lighthouse does")
	}
	text = bytes.TrimSuffix(text, []byte("\n"))
	if string(sum) != fmt.Sprintf("%x", sha256.Sum256(text)) {
		return s, errors.New("its checksum is wrong")
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, err
	}
	if s.Job != job {
		return s, fmt.Errorf("it belongs to job %q", s.Job)
	}
	if s.ended() {
		return s, nil
	}
	return s, s.Past.Validate()
}

// ended reports whether there is no quorum to continue after: the training is complete, or the job has had
// only a rendezvous so far.
func (s state) ended() bool {
	return (s.Highest > 0 || len(s.Rendezvous.Groups) > 0) && s.Past.ID == 0 && len(s.Past.Members) == 0
}

// takeState locks the state directory, if one is set. If that fails and the directory is the default, the
// lighthouse starts without it.
func (c *Config) takeState() (*os.File, error) {
	if c.StateDir == "" {
		return nil, nil
	}
	lock, err := lockState(c.StateDir)
	switch {
	case err == nil:
		return lock, nil
	case c.StateOptional:
		c.Logger.Warn("torchft: the state of jobs is not kept on disk", "state_dir", c.StateDir, "error", err)
		c.StateDir = ""
		return nil, nil
	default:
		return nil, fmt.Errorf("state_dir is %q, which cannot be used: %w", c.StateDir, err)
	}
}

// lockState creates the directory if needed, and locks it for this process.
func lockState(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		return nil, errors.New("another lighthouse uses it")
	}
	return lock, nil
}

// defaultStateDir returns the directory in which the command keeps its state: one for each host and port, so
// that lighthouses on one machine, or on several with one home directory, do not share it. It is empty if the
// user has no home directory, or if the port is 0: such a lighthouse has another port after each start.
func defaultStateDir(bind string) string {
	_, port, err := net.SplitHostPort(bind)
	if err != nil || port == "0" || port == "" {
		return ""
	}
	base := os.Getenv("XDG_STATE_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil || home == "" {
			return ""
		}
		base = filepath.Join(home, ".local", "state")
	}
	host := strings.ReplaceAll(machineName(), string(filepath.Separator), "_")
	return filepath.Join(base, "torchft", "lighthouse-"+host+"-"+port)
}
