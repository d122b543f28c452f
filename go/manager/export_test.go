package manager

// BreakMachine makes the next use of the server's machine panic, as a bug in it would.
func (s *Server) BreakMachine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.machine = nil
}
