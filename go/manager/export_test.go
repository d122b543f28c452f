package manager

import "time"

// BreakMachine makes the next use of the server's machine panic, as a bug in it would.
func (s *Server) BreakMachine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.machine = nil
}

// AllRanksWait reports whether no rank is in a step.
func (s *Server) AllRanksWait() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, _ := s.machine.Progress(time.Now())
	return p.Waits
}
